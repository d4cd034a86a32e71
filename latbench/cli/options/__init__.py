"""The arguments and options of all commands, as types of their functions' parameters, and their texts as values.

Help texts are noun phrases. They name the unit and, unless Typer prints it, the default. Each file serves a few
commands: making all options takes longer than most commands run.
"""
