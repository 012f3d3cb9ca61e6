"""What users call: they compile a module, search for a plan, and check or look at what came of
it.
"""
