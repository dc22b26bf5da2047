"""The images' host side, with engines that only write down what they were told, and what an image runs first."""
