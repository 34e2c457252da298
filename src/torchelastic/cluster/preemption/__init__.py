"""Agent process: notices that this machine or pod is about to be taken away.

notices   what each platform answers, and what it means; pure
sources   how to ask each platform: AWS, GCP, Azure, Kubernetes, a file
watcher   chooses the sources (`--preemption`) and asks them until a notice comes
"""
