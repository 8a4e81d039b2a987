"""What commands use of their machine: processes, signals, files, the terminal, remote storage."""
