"""The memory of keys, values and adapters: pages on the device, copies of parked sequences on the host. Bytes only;
`motet_runner.plan` knows the owners."""
