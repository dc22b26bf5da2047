"""The first page: is NSA slower, where, since which commit, and what says that it is right?"""
