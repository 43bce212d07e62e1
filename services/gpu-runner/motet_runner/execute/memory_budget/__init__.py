"""The number of pages of keys, values and adapters that fit into memory beside everything else. The pages themselves
are in `motet_runner.memory`."""
