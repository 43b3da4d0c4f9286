"""Transforms of observations and rewards between the env and the module, with statistics that are shared and saved."""
