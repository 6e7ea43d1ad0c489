"""With accelerate, transformers, peft, Lightning, torchtitan, verl and TRL: a module for each, imported by who uses it.

Each module imports its client, so nothing here is imported by ``flatshard`` itself. They stand on the public names only.
Arguments have the client's names: a ``model``, where flatshard says ``module``. See docs/integrations for what to write
with each of them.
"""
