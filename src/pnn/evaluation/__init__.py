"""What a model says: accuracy and loss on fixed masks, and predictions for texts with [MASK]."""
