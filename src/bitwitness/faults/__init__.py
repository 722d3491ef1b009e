"""Faults on purpose: a grammar for them, an injector that proves that they landed, and campaigns that judge every check.

A detector that was never shown the shapes that real faults have is a hope. The published fault models are written here as
data, strike any PyTorch job through one injector, and a campaign counts what each check made of them. It stands above the
guard, which knows nothing of it: the guard offers seams (`guard.seams`), and whoever wants to do harm fills them in.
"""
