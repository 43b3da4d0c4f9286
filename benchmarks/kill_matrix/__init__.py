"""The kill matrix: small real runs in which something fails at a drawn moment, and what must be true afterwards."""
