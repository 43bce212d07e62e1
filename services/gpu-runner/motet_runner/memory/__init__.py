"""The memory of keys, values and adapters: pages on the device, copies of parked sequences on the host.
`motet_runner.plan` decides which page belongs to whom."""
