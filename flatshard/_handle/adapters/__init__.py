"""Parameters with tensors inside: DTensors, quantised weights, other tensor subclasses."""
