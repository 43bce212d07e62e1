"""What `benchmarks.engine` measures, one module for each kind of comparison."""
