/* Calls one function of a kernel library on a picture of a process's memory: see arm.py.
 * usage: arm_call FILE; the file has [where, kind, function, arguments, references] in 64 bits each, eight arguments, the
 * places of addresses (arguments are places too), then the memory, which addresses are given into. It is overwritten with
 * what the call leaves there, the result first. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Numbers and the rest are in registers of their own, so what a function does not take does no harm. */
typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float);
typedef float (*Norm)(int64_t, int64_t, int64_t, float);

#define DECLARE(name) int64_t name();
#define ENTRY(name) {#name, (void *)name},
FUNCTIONS(DECLARE)
static const struct { const char *name; void *function; } functions[] = {FUNCTIONS(ENTRY)};

typedef struct { char name[32]; int64_t arguments[8]; int64_t addresses, size; float numbers[2]; } Header;

int main(int count, char **words) {
    FILE *file = count == 2 ? fopen(words[1], "r+b") : NULL;
    Header head;
    if (!file || fread(&head, sizeof head, 1, file) != 1) return 1;
    int64_t *places = malloc(head.addresses * 8 + 8);
    char *memory = aligned_alloc(4096, (head.size + 4095) / 4096 * 4096);
    if (fread(places, 8, head.addresses, file) != (size_t)head.addresses) return 2;
    if (fread(memory, 1, head.size, file) != (size_t)head.size) return 3;
    for (int64_t i = 0; i < head.addresses; i++) {  /* places below 0 are arguments */
        char *at = places[i] < 0 ? (char *)&head.arguments[-1 - places[i]] : memory + places[i];
        int64_t value;
        memcpy(&value, at, 8);
        value += (int64_t)memory;
        memcpy(at, &value, 8);
    }
    const int64_t *a = head.arguments;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(functions[i].name, head.name)) continue;
        int64_t result = 0;
        if (!strcmp(head.name, "vbrt_norm")) {
            const float norm = ((Norm)functions[i].function)(a[0], a[1], a[2], head.numbers[0]);
            memcpy(&result, &norm, 4);
        } else {
            result = ((Function)functions[i].function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], head.numbers[0],
                                                              head.numbers[1]);
        }
        rewind(file);
        return fwrite(&result, 8, 1, file) != 1 || fwrite(memory, 1, head.size, file) != (size_t)head.size || fclose(file);
    }
    return 4;
}
