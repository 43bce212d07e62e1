"""How long the iterations of a runner take: fitted from its step trace, or taken from tables and laws."""
