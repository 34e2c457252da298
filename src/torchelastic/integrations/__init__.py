"""Worker process: run + keep for Lightning, Transformers and Accelerate, in one line.

lightning      Keep, a callback for Lightning's Trainer
transformers   Keep, a callback for the Trainer of Hugging Face
accelerate     Keep, for loops written with Accelerate
frameworks     imports a framework, or raises if it is missing
position       the position in an epoch, and how to return to it

Each module needs its framework; import it by its full name.
"""
