"""A recording for which no GPU has enough memory."""

import torch


def too_large(kind):
    class TooLarge(kind):
        def __init__(self, run, *rest):
            def greedy():
                held = run()
                if torch.cuda.is_current_stream_capturing():
                    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
                return held

            super().__init__(greedy, *rest)

    return TooLarge
