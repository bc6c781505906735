"""A self-contained HTML page of one run or several side by side."""
