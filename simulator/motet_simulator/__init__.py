"""Motet in virtual time, at the speed of a profile. No torch, no threads, no sockets and no HTTP; no files but those
that a caller names.

`world/` is what surrounds a process: time, its event loop, the network. `trials/` runs the services in it, does to them
what a plan says, and checks what must hold. `workloads/` reads and makes requests, `profiles/` says how long iterations
take, and `plan/` answers how many runners a workload needs, by the real policies and the real plan of iterations.
"""
