"""How many pages of keys, values and adapters fit into memory, after everything else. It only counts;
`motet_runner.memory` has the pages."""
