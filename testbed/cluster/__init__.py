"""A real control plane, and nodes whose pods are processes of this machine."""
