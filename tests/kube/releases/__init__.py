"""What installs the product by its charts, as its users do. The others in tests/kube start parts of it as processes."""
