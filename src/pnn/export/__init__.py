"""Models for other people: a folder that transformers loads, with a model card, remote code and ONNX on request."""
