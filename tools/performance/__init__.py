"""The tables and plots of docs/performance.md, from what benchmarks have printed."""
