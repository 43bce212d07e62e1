"""A kubelet whose pods are processes of this machine, for tests: `python -m tests.kube.kubelet`.

The API server, the controllers and everything that reads a pod's status see a node like any other. A container has its
own root, volumes, processes, user, rights and host name, a pod its own network and identity; what runs in it is this
checkout. The tests beside this file hold it to what the Kubernetes documentation promises.

What it is not: there are no images (`images.py` says what stands for one), no cgroups (limits are counted by the
scheduler and not enforced; a test says when memory is over), no seccomp, no kube-proxy (a Service is the addresses of
its pods, so its port is the container's port), no NetworkPolicy, no `kubectl exec` (a test has `Node.execute`), and the
address of a node stands for the machine that the tests run on.
"""
