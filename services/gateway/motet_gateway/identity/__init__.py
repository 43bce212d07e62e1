"""Who asks: keys, and what each may see and do."""
