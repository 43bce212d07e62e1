"""How many pages of keys, values and adapters fit into memory, after everything else."""
