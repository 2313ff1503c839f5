// Put in front of the kernels when they are compiled to be counted. The compiler reports every load and store that is in the text, but a
// streaming store is an intrinsic, of which it knows no address: here it is a plain one.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#define _mm_stream_si128(p, v) (*(p) = (v))
#define _mm256_stream_si256(p, v) (*(p) = (v))
#define _mm512_stream_si512(p, v) (*(p) = (v))
#endif
