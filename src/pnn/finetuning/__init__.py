"""Fine-tuning on GLUE and SuperGLUE: tasks, their official metrics, and files that the benchmarks' servers take."""
