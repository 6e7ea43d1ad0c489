"""Files that every layer imports: options, environment, errors, names, events, frames."""
