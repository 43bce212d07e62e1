"""How to build the environments of the engines that benchmarks measure beside the product (`make peer`)."""
