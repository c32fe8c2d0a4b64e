"""The process: settings, threads, signals, logs, commands, and a local cluster to try things on."""
