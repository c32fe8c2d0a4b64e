"""Hooks of mkdocs: the site also has the pages at the root of the repository and the files of
``deploy/``, and the links between all of them work in both places."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {"README.md": "index.md"} | {
    name: f"{Path(name).stem.lower()}.md"
    for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    if (ROOT / name).exists()
}
"""The page of the site by its path in the repository."""
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the root, and the files of ``deploy/`` to be downloaded."""
    for path, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for file in sorted((ROOT / "deploy").rglob("*")):
        if file.is_file() and file.name != "token":  # of Kubernetes: a secret, which git ignores
            name = file.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    in_site = page.file.src_uri
    by_page = {site: path for path, site in ROOT_PAGES.items()}
    folder = posixpath.dirname(by_page.get(in_site, f"docs/{in_site}"))

    def turn(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        uri = ROOT_PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(uri) is None:
            if (ROOT / path).exists():  # source code is not on the site
                return text
            return link.group()  # wrong: mkdocs says so
        return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(in_site))}{anchor or ''})"

    return LINK.sub(turn, markdown)
