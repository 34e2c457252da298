"""Worker process: `State` and `TorchState`, the training state that survives a failure.

state             `State`, the interface; versions, and which ranks give their state to others
torch_state       `TorchState`, made of a model, optimizers and other parts
parts             the parts that it is made of, as they were given, and which hear of commits
compatibility     checks that all states of a world have one form
"""
