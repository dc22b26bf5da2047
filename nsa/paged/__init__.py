"""Keys and values of many sequences in pages, shared between those with a common prefix.

The words are vLLM's, but for "page" where vLLM says "block", which is the paper's word for something else: an allocator
hands out pages and counts their references (`allocator.py`), a page table says where the rows of a sequence lie, its
null page stands where there is none, and a step that fails is rolled back (`tables.py`).
"""
