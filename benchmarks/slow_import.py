"""Stands for a heavy library: importing it takes two seconds.

It sleeps instead of computing, so that it costs two seconds however many workers import it at
once and however many cores there are.
"""

import time

time.sleep(2)
