"""What tests and benchmarks run the product in, and beside: a Kubernetes cluster of processes, a local stack, stand-ins
for services behind a gateway, and a plain sampler. It imports neither tests nor benchmarks."""
