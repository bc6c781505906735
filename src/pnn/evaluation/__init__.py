"""Numbers from a model: accuracy and loss on fixed masks."""
