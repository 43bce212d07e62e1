"""Where keys, values and adapters lie: pages on the device, copies of parked sequences on the host. Bytes only; owners
are in `motet_runner.plan`."""
