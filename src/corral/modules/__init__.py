"""Networks: the module contract, the default modules, action distributions, and inference."""
