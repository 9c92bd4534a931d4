"""The commands: arguments in, one call of the code below, an exit status out."""
