"""What Java's AutoRecovery does, or is known to do wrong, and which tests show what ours does.

``make compat`` makes ``docs/compatibility.md`` of it: the rows stand in the TOML files here, one
file for each part of the project (``catalogue``); tests say by the marker ``compat`` which rows
they show; ``plugin`` writes that down within a pytest (``evidence``), which ``gathering`` runs;
``document`` finds what is lacking and makes the page.
"""
