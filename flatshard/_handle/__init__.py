"""One flat parameter: who sits where, its memory and its state. Knows no hooks and no module tree."""
