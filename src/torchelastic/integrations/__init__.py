"""Worker process: run + keep for Lightning, Transformers and Accelerate, in one line.

lightning      Keep, a callback for Lightning's Trainer
transformers   Keep, a callback for the Trainer of Hugging Face
accelerate     Keep, for loops written with Accelerate
frameworks     finds a framework, or says that it is missing
position       where in an epoch a training is, and how to come back there

Each module needs its framework, and is imported by its full name.
"""
