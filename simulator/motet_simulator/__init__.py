"""Motet in virtual time: what the real policies and the real plan do with a workload, at the speed of a profile.

`workloads` reads and makes requests, `profiles` says how long iterations take, `plan` runs both and answers how many
runners are needed. No torch, no sockets, no files but those that a caller names.
"""
