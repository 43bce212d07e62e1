"""What `benchmarks.gpu` measures, goal by goal."""
