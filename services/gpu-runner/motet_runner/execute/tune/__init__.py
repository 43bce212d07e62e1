"""What is measured on this machine and kept for its next start: the number of threads, and the type of numbers."""
