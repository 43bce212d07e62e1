"""Tests that install the product by its charts, as users do. Others in tests/kube start parts of it as processes."""
