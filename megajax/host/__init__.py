"""What a command needs of its machine: processes, signals, files, the terminal, remote storage."""
