"""A kubelet whose pods are processes of this machine, for tests: `python -m testbed.cluster.kubelet`.

To the API server, the controllers and all that reads a pod's status, it is a node like any other. A container has its
own root, volumes, processes, user, permissions and host name; a pod has its own network and identity. A container
runs this checkout. The tests in this folder check what the Kubernetes documentation promises.

What it lacks: images (`images.py` says what replaces them), cgroups (the scheduler counts limits, but nothing enforces
them; a test says when memory is exhausted), seccomp, kube-proxy (a Service is the addresses of its pods, so its port is
the container's port), NetworkPolicy, and `kubectl exec` (a test has `Node.execute`). The address of a node is an
address of the machine that the tests run on.
"""
