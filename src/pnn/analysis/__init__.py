"""What a trained model does inside: each analysis runs a model over held-out text and says what it found, with a control."""
