"""What uses the library from outside: the command `corral`, played episodes, reports and searches."""
