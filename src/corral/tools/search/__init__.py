"""Search of hyperparameters with Optuna: the space, the study, and the files of a search. `corral search` runs it."""
