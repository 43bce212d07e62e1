"""What tenants, adapters and API keys may use: their accounts, and who draws from which. Pure."""
